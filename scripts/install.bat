@echo off
rem Install lora_fp8 on Windows: double-click this file. Its options are those of install.ps1.
powershell -NoProfile -ExecutionPolicy Bypass -File "%~dp0install.ps1" %*
set code=%errorlevel%
rem Started by a double click, the window would close before anybody has read it.
echo %cmdcmdline% | find /i "%~0" >nul && pause
exit /b %code%
